"""Benchmarks: what a step costs, beside what the machine allows. The core imports nothing of it."""
