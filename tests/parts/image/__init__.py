"""Builds and tests the image of docker/Dockerfile.

`make image-test` does this without an engine, `make docker-test` with Docker's engine.
"""
