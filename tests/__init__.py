"""An error that no command expects must fail a test or a fuzzer, not become a line."""

import os

os.environ["LLAMACPP_INSTR_TRACEBACK"] = "1"
