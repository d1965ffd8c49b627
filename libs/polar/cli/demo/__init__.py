"""`polar demo`: a small agent, a small model and everything between them, and what no other tool shows of it."""
