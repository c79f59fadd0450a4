"""Parameters and their options: the table of options, param groups, learning-rate factors, update rules, DTensors
as data.
"""
