"""The operators of K3HAL, one file each; a file's name is its operator's name."""
