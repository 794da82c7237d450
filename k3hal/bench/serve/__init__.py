"""Load on a server over HTTP: who asks when, what came back when, and what that amounts to."""
