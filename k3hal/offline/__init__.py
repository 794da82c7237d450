"""Generation without a server: one request from the command line, or a file of them."""
