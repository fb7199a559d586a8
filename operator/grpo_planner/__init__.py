"""The planner: from a GRPOJob's spec and a GPU inventory to an ExecutionPlan, with numbers and
reasons.

Pure: no cluster, no torch, no clock; the same spec and inventory give the same plan. How one comes
about:

    GRPOJobSpec
    └─ Demand            the job with the shapes of its models and the limits that its pins set
       └─ Method         what is trained, ZeRO stage, where the reference is, as the pins allow
          └─ Variants    the method on N processes in one precision, at every setting of its Knobs
             └─ Footprint   one of these: its Setup, and its Prediction from the memory model

    Inventory
    └─ Pool              nodes with the same GPU
       └─ Place          pods on some of these nodes, with a number of GPUs each

    Footprint × Place
    └─ Option            both with the time of a step: it fits, or what it lacks is known
       └─ Candidate      an option as a plan: chosen, or rejected with a reason and a number
          └─ PlanResult  the chosen plan and what it was compared with, or Fixes if none fits

Rooms: model (shapes), hardware (pools), memory (predictions), time (of a step), and search
(everything from Demand to Option). The others are result (the answer), explain (its sentences and
Fixes) and replan (plans that have run).
"""
