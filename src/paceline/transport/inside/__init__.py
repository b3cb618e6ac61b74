"""A worker of several processes: how they find each other, and how the fleet sees one worker."""
