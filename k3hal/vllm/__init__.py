"""K3HAL in vLLM: a platform plugin and the model behind it. Importing this loads neither vLLM nor torch."""
