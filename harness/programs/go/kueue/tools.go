//go:build tools

// Package tools pins the manager of Kueue, in a module of its own: nothing else needs what it needs.
package tools

import _ "sigs.k8s.io/kueue/cmd/kueue"
