"""A cluster that does not exist: what a step costs on it, from the plan that its ranks would make."""
