"""Coverage-guided fuzzing of everything that reads a file from elsewhere: `make fuzz`.

corpus      inputs by kind, seeds and every input that once found something;
            tests/cli/test_fuzz_corpus.py replays them without a fuzzer
targets     one module a surface: KIND says which corpus, `attempt` does what a command does
guard       what a finding is
mutate      changes an input where it means something: a value in a line, a field of a header
growth      inputs that are long in one respect, and what their double takes
seeds       writes the seeds of the corpus anew
"""
