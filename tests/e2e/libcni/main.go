// Command libcni-driver carries out one CNI verb on a network list through
// libcni, the library that containerd and podman use, and prints the result.
//
//	libcni-driver -conf F -path DIR[:DIR] -cache DIR -id ID [-netns P] [-ifname N] VERB
//
// VERB is VALIDATE, ADD, CHECK or DEL. What libcni answers goes to stdout as
// JSON, the result of an ADD in the version of the list; an error goes to
// stdout as {"error": text} with exit status 1.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
)

func run() (interface{}, error) {
	conf := flag.String("conf", "", "file of the network list")
	path := flag.String("path", "", "plugin directories, joined by colons")
	cache := flag.String("cache", "", "directory in which results are kept")
	id := flag.String("id", "", "container id")
	netns := flag.String("netns", "", "file of the network namespace")
	ifname := flag.String("ifname", "eth0", "interface in the namespace")
	pod := flag.String("pod", "", "pod name")
	flag.Parse()

	list, err := libcni.ConfListFromFile(*conf)
	if err != nil {
		return nil, err
	}
	cni := libcni.NewCNIConfigWithCacheDir(filepath.SplitList(*path), *cache, nil)
	rt := &libcni.RuntimeConf{
		ContainerID: *id,
		NetNS:       *netns,
		IfName:      *ifname,
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "e2e"}, {"K8S_POD_NAME", *pod},
		},
	}
	switch verb := flag.Arg(0); verb {
	case "VALIDATE":
		return cni.ValidateNetworkList(context.Background(), list)
	case "ADD":
		return cni.AddNetworkList(context.Background(), list, rt)
	case "CHECK":
		return nil, cni.CheckNetworkList(context.Background(), list, rt)
	case "DEL":
		return nil, cni.DelNetworkList(context.Background(), list, rt)
	default:
		return nil, fmt.Errorf("unknown verb %q", verb)
	}
}

func main() {
	answer, err := run()
	if err != nil {
		answer = map[string]string{"error": err.Error()}
	}
	json.NewEncoder(os.Stdout).Encode(answer)
	if err != nil {
		os.Exit(1)
	}
}
