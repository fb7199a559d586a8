"""The documentation site: MkDocs' hooks for `make docs`."""
