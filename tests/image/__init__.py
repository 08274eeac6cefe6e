"""The image of docker/Dockerfile, built and tried for real: `make image-test`."""
