"""Clinics that fine-tune one language model by LoRA."""
