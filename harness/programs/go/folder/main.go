// Command folder makes or removes the folder of a volume on its node, in the helper pod of the local path provisioner.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	path := flag.String("p", "", "the folder")
	action := flag.String("a", "", "create or delete")
	flag.String("s", "", "the volume's size, which nobody enforces")
	flag.String("m", "", "the volume's mode")
	flag.Parse()
	if err := run(*action, *path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(action, path string) error {
	switch action {
	case "create":
		if err := os.MkdirAll(path, 0o777); err != nil {
			return err
		}
		return os.Chmod(path, 0o777) // past the umask: training pods run as a user of their own
	case "delete":
		return os.RemoveAll(path)
	}
	return fmt.Errorf("unknown action %q", action)
}
