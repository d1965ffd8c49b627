"""The command line: `polar`."""
