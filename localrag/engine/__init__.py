"""What runs a model inside this process, through llama.cpp."""
