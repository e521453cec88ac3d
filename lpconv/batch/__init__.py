"""Many jobs from one manifest: read it, run it, resume it, lock what it resolved to, report it as JUnit."""
