//go:build tools

// Package tools pins kwok, in a module of its own: it does not compile with the client library that helm needs.
package tools

import _ "sigs.k8s.io/kwok/cmd/kwok"
