//go:build tools

// Package tools pins cosign, which signs what a release publishes.
package tools

import (
	_ "github.com/sigstore/cosign/v2/cmd/cosign"
)
