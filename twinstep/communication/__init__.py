"""What does a function send? Read from its source's trace (jaxpr) and from its compiled program."""
