"""What every process of Polar shares: settings, clock, logs, tokens, the loop that runs services, the node link.

Import the modules, not this package: `polar.service.clock` and `.settings` need the base install only, `.tokens`
PyJWT, `.admin` aiohttp and prometheus-client, `.node` stands on `polar.bus`.
"""
