"""What low precision buys on this machine: time, memory, energy and error beside a compiled baseline."""
