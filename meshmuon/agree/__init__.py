"""From the parameters of a step to one plan that all ranks share, or one error that all ranks raise."""
