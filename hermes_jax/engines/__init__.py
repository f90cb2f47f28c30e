"""Who answers: engines that give tokens and endpoints that give messages."""
