"""Evaluators. Each is one module, loaded by name through `polar.evaluator.registry`."""
