"""The image of docker/Dockerfile, built and tried for real.

`make image-test` does so without an engine, `make docker-test` on Docker's.
"""
