"""What a param group says of its parameters: checked options, learning-rate factors, update rules, DTensors as plain data."""
