"""The programs that call the plugin: libcni itself, podman and containerd."""
