//go:build tools

// Package tools pins the object store that tests stand on, in a module of its own: nothing else needs what it needs.
package tools

import _ "github.com/versity/versitygw/cmd/versitygw"
