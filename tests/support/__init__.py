"""What several folders of tests share: ranks as threads or processes, models and tensors, oracles, bounds, hostile
machines.
"""
