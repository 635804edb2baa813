"""What an installation on a machine without a GPU needs besides the packages."""
