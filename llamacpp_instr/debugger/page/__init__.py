"""The page of `instr debug --page`: the Debug Adapter Protocol over a WebSocket, and pictures."""
