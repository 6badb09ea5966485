-- Elects the leader of a task: the first router that asks leads as long as it asks again in time.
-- ARGV: task, router id, ms. Returns 1 if this router leads.
local leader = redis.call('GET', lead_key(ARGV[1]))
if leader and leader ~= ARGV[2] then return 0 end
redis.call('SET', lead_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
return 1
