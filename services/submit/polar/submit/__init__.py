"""Submit: the HTTP API, the view of what goes on, callbacks, and the scheduler.

Import `polar.submit.service` (`SubmitService`) and `polar.submit.settings` (`SubmitSettings`); this package itself
imports nothing, so that reading the settings stays cheap.
"""
