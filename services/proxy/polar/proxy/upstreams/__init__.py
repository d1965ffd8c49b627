"""The engines behind the proxy: which serve what, which of them a session's call goes to, and who waits for it."""
