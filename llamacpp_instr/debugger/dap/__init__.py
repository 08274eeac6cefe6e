"""The Debug Adapter Protocol: an editor, or a page, drives the debugger."""
