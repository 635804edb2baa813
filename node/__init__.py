"""The daemon: configuration, command line, supervision and what the operator sees."""
