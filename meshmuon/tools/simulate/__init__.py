"""A cluster that is not there: what a step costs on it, from the plan that its ranks would make."""
