// Command libcni-driver carries out one CNI verb on a network list through
// libcni, the library that containerd and podman use, and prints the result.
//
//	libcni-driver -conf F -path DIR[:DIR] -cache DIR -id ID [-netns P] [-ifname N]
//	              [-ip A] [-capabilities JSON] VERB
//
// VERB is VALIDATE, ADD, CHECK or DEL. What libcni answers goes to stdout as
// JSON, the result of an ADD in the version of the list; an error goes to
// stdout as {"error": text} with exit status 1, and with the code and the msg of
// the plugin's error object where libcni has kept them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

func run() (interface{}, error) {
	conf := flag.String("conf", "", "file of the network list")
	path := flag.String("path", "", "plugin directories, joined by colons")
	cache := flag.String("cache", "", "directory in which results are kept")
	id := flag.String("id", "", "container id")
	netns := flag.String("netns", "", "file of the network namespace")
	ifname := flag.String("ifname", "eth0", "interface in the namespace")
	pod := flag.String("pod", "", "pod name")
	ip := flag.String("ip", "", "address to ask for in CNI_ARGS")
	capabilities := flag.String("capabilities", "{}", "arguments by capability")
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
	if *ip != "" {
		rt.Args = append(rt.Args, [2]string{"IP", *ip})
	}
	if err := json.Unmarshal([]byte(*capabilities), &rt.CapabilityArgs); err != nil {
		return nil, err
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
		told := map[string]interface{}{"error": err.Error()}
		var object *types.Error
		if errors.As(err, &object) {
			told["code"], told["msg"] = object.Code, object.Msg
		}
		answer = told
	}
	json.NewEncoder(os.Stdout).Encode(answer)
	if err != nil {
		os.Exit(1)
	}
}
