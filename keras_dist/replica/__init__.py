"""The code that runs in replicas: context, state, variables, gradients."""
