//go:build tools

// Package tools pins the provisioner of the default storage class, in a module of its own: its client library is older.
package tools

import _ "github.com/rancher/local-path-provisioner"
