"""Adapters for trainers. Each module needs the trainer that it is named after; nothing else in meshmuon imports
them.
"""
