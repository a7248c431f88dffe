"""What is settled before JAX starts, and several processes as one program."""
