"""The command line of OptPipe: parses, calls, prints."""
