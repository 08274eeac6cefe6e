"""Coverage-guided fuzzing of everything that reads a file from elsewhere: `make fuzz`.

corpus      inputs by kind: seeds and former findings; tests/cli/test_fuzz_corpus.py replays them
targets     one module for each kind, a function for each surface: it does what a command does
guard       defines what a finding is
mutate      changes an input where it matters: a value in a line, a field of a header
growth      inputs that are long in one respect, and the cost of doubling them
seeds       writes the seeds of the corpus
"""
