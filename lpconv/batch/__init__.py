"""Run many jobs from one manifest, with resuming, a lock file and a JUnit report."""
