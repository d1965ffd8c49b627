"""Where a prompt's ids come from, and how they stand to what was sampled before.

`conversation`, `turns`: which earlier call a request goes on from. `compare`: by how many ids a prompt differs from it.
`splice`: what of a prompt is new. `asking`: the engine's routes. `continuing`: all of it for one call.
"""
