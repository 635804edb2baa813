"""What the commands do. One module a command; nothing heavy is imported before its command is given."""
