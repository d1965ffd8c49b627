"""Builder strategies. Each is one module, loaded by name through `polar.builder.registry`."""
