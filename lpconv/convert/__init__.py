"""Conversion: plan, apply, verify, restore."""
