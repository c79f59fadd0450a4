"""How long a step with a plan takes, on machines that were measured or described."""
