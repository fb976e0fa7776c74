"""remat inside the libraries people train with, one module each, over their public hooks.

    remat.integrations.transformers   enable(model, ...), and a callback for its Trainer
    remat.integrations.accelerate     dynamo_plugin(...) for an Accelerator
    remat.integrations.lightning      a callback for its Trainer
    remat.integrations.torchtitan     apply_ac(model, config) for its activation-checkpoint settings

Import the one that is needed: nothing here is imported by remat itself, and each needs its library installed.
"""
